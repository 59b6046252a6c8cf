"""What a strategy would do: a workload replayed on a model of a fleet, by the dispatcher's own code.

The command is `forebay.cli.simulate_policy`; engines that answer over HTTP are `forebay.simulator`.
"""
