//! The dashboard: a page that shows devices, jobs and decisions, live or from journals.
//!
//! ```text
//!  daemon ── ps, machine, journal ─▶ feed ─┐
//!                                          ├─ lines of JSON ─▶ page (canvas, tables)
//!  journals ─────── timeline ──────────────┘
//! ```
//!
//! - The page is static and part of the program. It asks for everything with a token, in requests
//!   of [`crate::api::http`].
//! - A feed looks once for all viewers who see the same, and only while there are any.
//! - [`viewer`] serves the page from a client of a daemon, or of journals.

pub(crate) mod feed;
pub(crate) mod recent;
pub mod viewer;

/// A file of the page.
pub(crate) struct Asset {
    pub(crate) kind: &'static str,
    pub(crate) body: &'static str,
}

/// What the page may load, which is only itself: whatever a job's name contains, it is not run.
pub(crate) const POLICY: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; \
     style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; \
     frame-ancestors 'none'\r\nReferrer-Policy: no-referrer";

macro_rules! assets {
    ($($path:literal $kind:literal $file:literal),* $(,)?) => {
        /// The file at a path.
        pub(crate) fn asset(path: &str) -> Option<Asset> {
            let (kind, body) = match path {
                $($path => ($kind, include_str!(concat!("dashboard/page/", $file))),)*
                _ => return None,
            };
            Some(Asset { kind, body })
        }
    };
}

assets! {
    "/" "text/html; charset=utf-8" "index.html",
    "/style.css" "text/css; charset=utf-8" "style.css",
    "/icon.svg" "image/svg+xml" "icon.svg",
    "/main.js" "text/javascript; charset=utf-8" "main.js",
    "/model.js" "text/javascript; charset=utf-8" "model.js",
    "/link.js" "text/javascript; charset=utf-8" "link.js",
    "/lanes.js" "text/javascript; charset=utf-8" "lanes.js",
    "/table.js" "text/javascript; charset=utf-8" "table.js",
    "/views.js" "text/javascript; charset=utf-8" "views.js",
    "/panel.js" "text/javascript; charset=utf-8" "panel.js",
    "/compare.js" "text/javascript; charset=utf-8" "compare.js",
    "/words.js" "text/javascript; charset=utf-8" "words.js",
}
