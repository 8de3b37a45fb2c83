"""The outer loop: `loop.OuterLoop` drives a replica's rounds, `outer_step` holds the arithmetic on tensors.

Importing this package loads nothing: `serverless` can describe and start replicas without torch.
"""
