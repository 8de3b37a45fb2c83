"""One small file for each service, on the service's own client, which is imported when it is used.

Invariant: an adapter translates. What is common (names, retries, budgets, logs, the store's word) is in `jobs/`.
"""
