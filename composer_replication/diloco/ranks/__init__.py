"""Replicas that are several processes: the first one of them leads, and alone speaks with the fleet.

Invariant: what is decided is decided in the first process, and told to the others, which do the same or raise the same.
"""
