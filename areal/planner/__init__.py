"""What a run will need and how fast it will be, computed from its config before anything starts.

    shapes      numbers in a model's weights, cache and activations, from its config.json
    devices     profiles of GPUs and CPUs: data files, measured or from data sheets
    workload    what a step generates and trains on
    memory      peak bytes of a training rank and of a server, by part and phase
    speed       seconds of a training step and of generation: rooflines with measured efficiencies
    engines     the sections of a config as engines with memory and speed
    plan        all of a run: memory, times, balance, losses, and why it cannot fit
    layouts     the fastest layout of a number of GPUs that fits; scale: of well-known models
    simulate    a discrete-event model of the run
    prediction  what a step that was trained should have reached
    models      where a config.json is found; report: a plan in words
    measure     the profile of this machine (the one file that loads torch)

Nothing here loads torch but `measure`, and nothing writes files.
"""
