"""The report of a run of checks or times: its data, its metrics, and how it is shown."""
