#!/usr/bin/env bash
#SBATCH --job-name=fresco-agent --ntasks-per-node=1 --exclusive --no-kill --output=fresco-agent-%j.log
# One machine of a run: the job of `fresco run RECIPE cluster.engine=slurm cluster.nodes=N`, which submits it N times.
# Within one allocation of your own: `sbatch --nodes=N launch/slurm.sh`, with cluster.engine=local and FRESCO_JOIN and
# FRESCO_AGENTS_KEY as below. Without --no-kill on both commands a lost node would cancel the others' agents.
set -euo pipefail
: "${FRESCO_JOIN:?the command that joins: fresco join HEAD --key -}" "${FRESCO_AGENTS_KEY:?the content of RUN/agents.key}"
srun --no-kill --kill-on-bad-exit=0 bash -c "exec $FRESCO_JOIN" <<< "$FRESCO_AGENTS_KEY"
