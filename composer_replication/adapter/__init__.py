"""What the trainers' adapters share: options, counting, the course of a run, a replica's own files.

Invariant: imports no trainer. An adapter adds what its trainer alone can tell: where it stands, which rates come,
when it stops.
"""
