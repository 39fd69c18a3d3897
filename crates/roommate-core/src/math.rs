//! Numerical helpers with laws and slow twins of their own; nothing here knows about jobs or GPUs.

pub mod boost;
pub mod choice;
pub mod conic;
pub mod kmeans;
pub mod least_squares;
pub mod lp;
pub mod matching;
pub mod rng;
pub mod stat;
