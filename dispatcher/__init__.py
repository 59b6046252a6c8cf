"""The service that takes jobs off queues, decides, sends, and records."""
