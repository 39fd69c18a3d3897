//! The simulator of Roommate: a trace-driven world in virtual time around the same engine that
//! drives real GPUs, the trace readers that feed it, and the HTML reports of its results.

pub mod advice;
pub mod bound;
pub mod compat;
pub mod fault;
pub mod oracle;
pub mod report;
pub mod scenario;
pub mod serving;
pub mod trace;
pub mod truth;
pub mod workload;
pub mod world;
