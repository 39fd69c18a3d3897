//! How fast a job runs: what a step is worth, how long it takes, and what limits it.

pub mod goodput;
pub mod latency;
pub mod progress;
pub mod sensitivity;
pub mod throttle;
pub mod usage;
