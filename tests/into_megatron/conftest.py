import sys
from pathlib import Path

# Spawned processes inherit this path: they import `trainer_jobs` by name.
sys.path.insert(0, str(Path(__file__).parent))
