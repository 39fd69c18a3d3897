//! W3C trace context: the trace of the client goes on, or one begins here.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};

const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");

/// The trace of a request, with a span of the front.
pub(crate) struct Trace {
    value: HeaderValue,
}

impl Trace {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(TRACE_PARENT).and_then(|v| v.to_str().ok()).and_then(parse);
        let span = format!("{:016x}", random() | 1);
        let (trace, flags) = given.map_or_else(
            || (format!("{:016x}{:016x}", random() | 1, random()), "00".into()),
            |(trace, flags)| (trace.to_string(), flags.to_string()),
        );
        let text = format!("00-{trace}-{span}-{flags}");
        let value = HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static(""));
        Self { value }
    }

    /// Sets the trace in the headers of a request or an answer.
    pub(crate) fn mark(&self, headers: &mut HeaderMap) {
        headers.insert(TRACE_PARENT, self.value.clone());
    }
}

/// The trace id and the flags of a header.
fn parse(text: &str) -> Option<(&str, &str)> {
    let parts: Vec<&str> = text.split('-').collect();
    let [version, trace, span, flags, ..] = parts[..] else { return None };
    let hex = |s: &str, n: usize| {
        s.len() == n && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    };
    let some = |s: &str| s.bytes().any(|b| b != b'0');
    let good = hex(version, 2) && version != "ff" && hex(trace, 32) && hex(span, 16);
    (good && hex(flags, 2) && some(trace) && some(span)).then_some((trace, flags))
}

/// Numbers that no other process has; a stream is begun with bytes of the kernel.
fn random() -> u64 {
    use std::cell::Cell;
    thread_local!(static STATE: Cell<u64> = const { Cell::new(0) });
    let mut state = STATE.get();
    if state == 0 {
        let mut bytes = [0; 8];
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        state = u64::from_le_bytes(bytes);
    }
    // splitmix64
    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    STATE.set(state);
    let mut z = state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_goes_on_with_a_span_of_its_own() {
        let given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let mut headers = HeaderMap::new();
        headers.insert(TRACE_PARENT, HeaderValue::from_static(given));
        let out = Trace::of(&headers).value;
        let out = out.to_str().unwrap();
        assert!(out.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && out.ends_with("-01"));
        assert_ne!(out, given);
        for bad in ["", "00-x-y-z", "00-00000000000000000000000000000000-00f067aa0ba902b7-01"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let fresh = Trace::of(&HeaderMap::new()).value;
        assert!(parse(fresh.to_str().unwrap()).is_some());
    }
}
