"""What `lt2 doctor` looks at: a machine's software, hardware and kernels, a store, the nodes of a Ray cluster.

Each part yields Findings; none of them changes anything but probe files, which it removes.
"""
