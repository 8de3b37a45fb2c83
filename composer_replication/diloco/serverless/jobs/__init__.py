"""Replicas as jobs of a service: what all back ends share.

`job.py` is what a service is asked for and what it says; `marks.py` what replicas and launchers leave in the store;
`verdict.py` decides from both; `container.py` runs inside the job; `job_executor.py` puts it together. A back end is a
subclass of `JobExecutor` with six short methods.
"""
