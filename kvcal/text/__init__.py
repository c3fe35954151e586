"""What `--text` means: sources, rows and token windows."""
