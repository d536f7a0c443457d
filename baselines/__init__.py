"""One file per method; a file dropped in here is found, nothing else needs an edit."""
