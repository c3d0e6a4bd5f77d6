"""What the operating system asks of a process: signals, temporary files, text that a terminal prints."""
