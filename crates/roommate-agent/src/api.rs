//! What users say to the daemon, and how: job files, the control socket, HTTP.

pub mod client;
pub mod control;
pub mod http;
pub mod job_file;
