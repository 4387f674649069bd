"""Files in object stores, on web servers, and behind fsspec: opening, listing, reading ranges, and what went wrong."""
