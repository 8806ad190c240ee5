"""Reading records: files of every format, the Hub, memory, objects."""
