"""Reading rows from files, memory and the token cache."""
