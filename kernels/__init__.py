"""The operations the engine is made of: one operation, one name, several bodies."""
