"""One adapter for each kind of data; `hocket.data.adapters` chooses."""
