//! Virtual time for Roommate: a trace-driven world around the very engine that drives real GPUs, the
//! readers that feed it, and the pages that show what came of it.

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
