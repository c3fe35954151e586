"""Every kernel is tried on this GPU before its first use: trials say what they see, verdicts keep it."""
