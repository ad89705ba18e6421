"""The training side: strategies, compile, loop, checkpoints, supervisor.

Never imports kopf, kubernetes or ctj_operator.
"""
