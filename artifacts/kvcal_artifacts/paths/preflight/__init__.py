"""Every kernel is tried on this GPU before its first use: trials measure it, verdicts stores what they find."""
