"""Search for the next kernel under the gates: proposers, stages that judge them, and a run folder that resumes."""
