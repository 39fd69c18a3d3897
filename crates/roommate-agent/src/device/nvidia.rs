//! The GPUs of this machine: inventory (`nvml`), counters (`sampler`), concurrent processes
//! (`mps`), a test of the limits (`selftest`), processes that do not belong here (`strays`) and
//! more work than was allowed (`excess`).
//!
//! Nothing here changes a setting of a GPU (compute mode, clocks, power, MIG, persistence), so
//! other users of the machine are not affected.

mod bounded_command;
mod excess;
pub(crate) mod gates;
mod mps;
mod nvml;
mod sampler;
mod selftest;
mod strays;

pub(crate) use excess::Excess;
pub(crate) use mps::Mps;
pub(crate) use mps::limits::{Found, Limit};
pub(crate) use mps::watched::Watched;
pub(crate) use nvml::{GpuInfo, inventory};
pub(crate) use sampler::{Counters, Reading, Sampler};
pub(crate) use selftest::test;
pub use strays::Stray;
pub(crate) use strays::Strays;

/// A pipe directory without an MPS daemon: a process with this directory runs without MPS, and does
/// not find another user's daemon.
pub(crate) const NOWHERE: &str = "/nonexistent";

#[cfg(test)]
pub(super) mod fake;
