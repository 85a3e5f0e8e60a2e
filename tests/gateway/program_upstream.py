"""An inference server that repeats its prompt, until it is killed: `python program_upstream.py PORT`."""

import sys
import threading

from rllm.testing.scripted import ScriptedEngine
from rllm.testing.scripted_server import ScriptedServer

if __name__ == "__main__":
    engine = ScriptedEngine(lambda messages: f"answer to {messages[-1]['content']}")
    with ScriptedServer(engine, port=int(sys.argv[1])):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        threading.Event().wait()
