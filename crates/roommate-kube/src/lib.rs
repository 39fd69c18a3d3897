//! Roommate on Kubernetes: a scheduler of pods that ask for parts of GPUs, and an agent of each
//! node.

pub mod assignment;
pub mod bench;
pub mod client;
pub mod constraint;
pub mod exposition;
pub mod fuzz;
pub mod ledger;
pub mod names;
pub mod objects;
pub mod request;
pub mod scheduler;
pub mod view;
pub mod world;
