"""What `--model` means: names, files, and weights on a device."""
