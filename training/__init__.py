"""Trains the built-in model `shapes`, and judges what it draws by looking at pixels."""
