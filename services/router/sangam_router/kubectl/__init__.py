"""``kubectl sangam``: see the fleet, move workers between roles, drain one.

A plugin: kubectl runs ``kubectl-sangam`` from the PATH. ``cli`` names commands and options;
``splits``, ``plan`` and ``persist_plan`` decide (pure); ``rebalance`` and ``drain`` carry out;
``cluster`` speaks to the API server and ``routers``, by port-forward, to the routers.
"""
