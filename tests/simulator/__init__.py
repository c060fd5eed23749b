"""Real vLLM schedulers and our connector around a model whose KV says whose it is.

A step of a real engine takes milliseconds, and most of it is arithmetic that has nothing
to do with us. Here everything that decides about KV is real (vLLM's scheduler, block
manager and output aggregation, our connector in both roles, our planning and our copies),
and only the model is not: instead of keys and values it writes, into every slot, a tag
that follows from all tokens up to that slot's, and when it needs a slot it compares.

- ``plan``      what will happen: an engine's setup and the events that befall it
- ``language``  the tokens and tags that a request must get
- ``engine``    the loop of vLLM's engine core over scheduler and workers
- ``worker``    a rank: KV caches, the model, and the order of calls of a model runner
- ``late``      copies that take their time, in an order nobody may rely on
- ``accounts``  what must hold after every step
- ``shrink``    a failing plan to the shortest that still fails
- ``mutations`` faults to put into the package, to see that the simulator finds them
"""
