//! Roommate on Kubernetes: a scheduler of pods that ask for parts of GPUs, and an agent of each
//! node.

pub mod agent;
pub mod assignment;
pub mod bench;
pub mod board;
pub mod client;
pub mod constraint;
pub mod controller;
pub mod crd;
pub(crate) mod event;
pub mod exposition;
pub mod fuzz;
pub mod ledger;
pub mod manifest;
pub mod names;
pub mod objects;
pub(crate) mod pages;
pub mod request;
pub mod scheduler;
pub mod snapshot;
pub mod story;
pub mod view;
pub(crate) mod watch;
pub mod webhook;
pub mod what_if;
pub mod world;
