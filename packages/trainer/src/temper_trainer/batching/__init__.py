"""From rollouts to what workers train on: samples, the step's plan, and each rank's packed share."""
