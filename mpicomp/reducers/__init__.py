"""How payloads get round and meet: one file each."""
