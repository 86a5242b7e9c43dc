"""One kernel a file: its body, its grid and memory, and one wrapper."""
