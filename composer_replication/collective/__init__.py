"""Averaging over the replicas of a fleet: codecs, the mean of a roster, and what carries the bytes.

`base` is the contract. `in_process` carries between threads, `process_group` over torch.distributed, `object_store`
through a folder or a bucket. All of them encode, add and decode with `codec` and `reduce`, so that equal
contributions give equal bits, whatever is between the replicas.
"""
