//! Numerical helpers with laws and slow twins of their own; nothing here knows about jobs or GPUs.

pub mod assignment;
pub mod boost;
pub mod choice;
pub mod conic;
pub mod forest;
pub mod gp;
pub mod lcb;
pub mod least_squares;
pub mod lp;
pub mod matching;
pub mod piecewise;
pub mod pool;
pub mod queueing;
pub mod rng;
pub mod stat;
pub mod twister;
