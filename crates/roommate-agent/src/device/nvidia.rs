//! The GPUs of this machine: inventory (`nvml`), counters (`sampler`), concurrent processes
//! (`mps`), and a test of the limits (`selftest`).
//!
//! Nothing here changes a setting of a GPU (compute mode, clocks, power, MIG, persistence), so
//! other users of the machine are not affected.

mod bounded_command;
mod mps;
mod nvml;
mod sampler;
mod selftest;

pub(crate) use mps::Mps;
pub(crate) use nvml::{GpuInfo, inventory};
pub(crate) use sampler::{Counters, Reading, Sampler};
pub(crate) use selftest::test;

/// A pipe directory without an MPS daemon: a process with this directory runs without MPS, and does
/// not find another user's daemon.
pub(crate) const NOWHERE: &str = "/nonexistent";

#[cfg(test)]
mod fake;
