"""Which tables and features there are, and where they go. No TensorFlow here."""
