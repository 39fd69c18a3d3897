//! SIGINT and SIGTERM of this process.

use crate::AgentError;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Becomes true when SIGINT or SIGTERM arrives. A second signal ends the process at once.
pub fn end_wanted() -> Result<Arc<AtomicBool>, AgentError> {
    let wanted = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let problem = || AgentError::file("catch signals in", Path::new("this process"));
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&wanted))
            .map_err(problem())?;
        signal_hook::flag::register(signal, Arc::clone(&wanted)).map_err(problem())?;
    }
    Ok(wanted)
}
