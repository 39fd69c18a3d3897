//! How fast a job runs: the length of a step, what a step is worth, and what limits it.

pub mod goodput;
pub mod latency;
pub mod progress;
pub mod sensitivity;
pub mod throttle;
