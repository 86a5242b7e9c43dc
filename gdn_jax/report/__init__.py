"""What a run of checks or times says: its data, its metrics, and how it is shown."""
