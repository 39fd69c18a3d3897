//! Virtual time for Roommate: a trace-driven world around the very engine that drives real GPUs.

pub mod fault;
pub mod trace;
pub mod world;
