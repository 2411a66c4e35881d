"""Owns the frozen output of all policies and templates, so that moving and renaming modules cannot change it unseen.

Knows nothing of what a good candidate is, nor of nvcc, devices and measurements.

`workloads.txt` says for which workloads and archs. Frozen of each are

- `spaces.jsonl`: the iteration space that the workload is lowered to, one workload a line;
- `proposals-ARCH.txt`: what each policy proposes for it: candidates in order, with their predicted seconds;
- `schedules-ARCH.txt`: of some of those candidates the digest of the module that their template makes;
- `names.toml`: what policies, templates and parameters are called by now; the other files give values of parameters in its order.

    python tests/replay/renew.py --show    # what differs
    python tests/replay/renew.py           # the same, and writes what is now right: review the diff

A renamed policy, template or parameter is one word in `names.toml`; renewing finds renamed parameters by itself. `project.py` alone
imports the project's modules.
"""
