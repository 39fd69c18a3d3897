//! GPUs of this machine: which there are (`nvml`), what they do (`sampler`), how several processes run
//! on one at the same time (`mps`), and whether limits really hold there (`selftest`).
//!
//! Nothing here changes a setting of a GPU (compute mode, clocks, power, MIG, persistence), so others may
//! use the machine as well.

mod bounded_command;
mod mps;
mod nvml;
mod sampler;
mod selftest;

pub(crate) use mps::Mps;
pub(crate) use nvml::{GpuInfo, inventory};
pub(crate) use sampler::{Counters, Reading, Sampler};
pub(crate) use selftest::test;

/// A folder in which nobody listens: a process that looks for MPS there does without, and does not find the daemon of
/// somebody else.
pub(crate) const NOWHERE: &str = "/nonexistent";

#[cfg(test)]
mod fake;
