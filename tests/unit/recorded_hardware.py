"""What the vendors' tools printed on real machines, as published in issue reports."""

# 8 x H100, nvidia-smi topo -m, two sockets; the header is underlined also into a pipe
H100_TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t56-111,168-223\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tPIX\tPXB\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
# 8 x M60-class on two sockets (kubernetes/kubernetes#53497): no NUMA column yet, padded with spaces
OLD_TOPOLOGY = """\
        GPU0    GPU1    GPU2    mlx4_0  CPU Affinity
GPU0     X      PIX     SYS     PHB     0-9,20-29
GPU1    PIX      X      SYS     PHB     0-9,20-29
GPU2    SYS     SYS      X      SYS     10-19,30-39
"""
# 2 x RTX 5090 on one host bridge: the driver refuses peer-to-peer between them
CONSUMER_TOPOLOGY = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-63\t0\t\tN/A
GPU1\tPHB\t X \t0-63\t0\t\tN/A
"""
CONSUMER_PEERS = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tGNS\t
 GPU1\tGNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  GNS  = GPU not supported
"""
OPENED_PEERS = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tOK\t\n GPU1\tOK\tX\tOK\t\n GPU2\tOK\tOK\tX\t\n"
# 2 x L4 in different NUMA nodes (NVIDIA/cuda-samples#284)
TWO_NODES = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tSYS\t0-7,32-39\t0\t\tN/A
GPU1\tSYS\t X \t16-23,48-55\t2\t\tN/A
"""
# 4 x MI250X: rocm-smi --showtopo
XGMI_TOPOLOGY = """\
======================= ROCm System Management Interface =======================
=========================== Weight between two GPUs ============================
       GPU0         GPU1         GPU2
GPU0   0            15           15
GPU1   15           0            15
GPU2   15           15           0

========================== Link Type between two GPUs ==========================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         XGMI
GPU1   XGMI         0            XGMI
GPU2   XGMI         XGMI         0

================================== Numa Nodes ==================================
GPU[0]\t\t: (Topology) Numa Node: 0
GPU[0]\t\t: (Topology) Numa Affinity: 0
GPU[1]\t\t: (Topology) Numa Node: 0
GPU[1]\t\t: (Topology) Numa Affinity: 0
GPU[2]\t\t: (Topology) Numa Node: 1
GPU[2]\t\t: (Topology) Numa Affinity: 1
============================= End of ROCm SMI Log ==============================
"""
# two islands of MI-class GPUs joined by PCIe
ISLANDS = """\
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2         GPU3
GPU0   0            XGMI         PCIE         PCIE
GPU1   XGMI         0            PCIE         PCIE
GPU2   PCIE         PCIE         0            XGMI
GPU3   PCIE         PCIE         XGMI         0
================================== End of ROCm SMI Log ===================================
"""
NO_ACCESS = "       GPU0 GPU1 GPU2\nGPU0 True False False\nGPU1 False True False\nGPU2 False False True\n"
MIG_LIST = """\
GPU 0: NVIDIA A100-PCIE-40GB (UUID: GPU-ce5b3123-f4f2-6250-8428-40617e5f9b9d)
  MIG 3g.20gb     Device  0: (UUID: MIG-90155500-9a09-5016-9746-95ef09bd78a6)
  MIG 1g.5gb      Device  1: (UUID: MIG-37b7fdd7-f1cc-51f3-9746-95ef09bd78a7)
GPU 1: NVIDIA A100-PCIE-40GB (UUID: GPU-9bd75b6b-cd91-ef22-8428-40617e5f9b9e)
"""
NPUS = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 91.3        33                0    / 0             |
| 0                         | 0000:xx:00.0  | 0           0    / 0          3197 / 65536         |
+===========================+===============+====================================================+
| 1     910B4-1             | OK            | 88.1        32                0    / 0             |
| 0                         | 0000:xx:00.0  | 0           0    / 0          3197 / 65536         |
"""
NEWER_NPUS = """\
| NPU   Name                | Health        | Power(W)             Temp(C)                 Hugepages-Usage(page)   |
| Chip  Phy-ID              | Bus-Id        | AICore(%)            Memory-Usage(MB)        HBM-Usage(MB)           |
+===========================+===============+======================================================================+
| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |
| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |
"""
EPYC = "processor\t: 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu sse avx avx2 sha_ni\n"
XEON = "model name : Intel(R) Xeon(R) Platinum 8462Y+\nflags : fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
GRACE = "processor\t: 0\nFeatures\t: fp asimd sve sve2\n"
