"""One supervisor per pod or local process group: it starts torchrun's agent, watches, and says how it all ended.

It imports no torch: it must answer within a second whatever the workers do, and it must live where torch is broken.

settings.py     what the pod's environment says          launch.py     the agent's command, environment, compile cache
agent.py        the agent's process (imports torch)      child.py      the first code of every worker process
run.py          the loop                                 watch.py      hung? stopping too long? (pure)
stacks.py       where do the workers hang                processes.py  find, bind and kill processes
outcome.py      marks -> exit code and cause (pure)      ending.py     report, termination message
logs.py         worker output, prefixed and remembered   endpoint.py   /metrics, /progress, /healthz
"""
