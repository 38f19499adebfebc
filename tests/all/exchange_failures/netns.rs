//! Two network namespaces joined by a cable, which can be cut.

use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// Two namespaces, `.0` with 10.231.x.1 and `.1` with 10.231.x.2. Removed when dropped.
pub struct Cable {
    names: [String; 2],
    devices: [String; 2],
    subnet: u8,
}

impl Cable {
    /// Makes the namespaces; `None`, with a line that says so, where they are not permitted.
    pub fn lay() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let pid = std::process::id();
        let cable = Self {
            names: ["a", "b"].map(|end| format!("egmem-{pid}-{number}{end}")),
            // Names of devices have 15 bytes at most.
            devices: ["a", "b"].map(|end| format!("eg{pid}{number}{end}")),
            // Only seen inside of the two namespaces, so that any will do.
            subnet: (pid % 200) as u8,
        };
        match cable.connect() {
            Ok(()) => Some(cable),
            Err(why) => {
                println!("skipped: network namespaces are not permitted: {why}");
                None
            }
        }
    }

    fn connect(&self) -> Result<(), String> {
        let [left, right] = &self.names;
        let [one, other] = &self.devices;
        ip(&["netns", "add", left])?;
        ip(&["netns", "add", right])?;
        // Made inside, so that the machine's own namespace never has them.
        let link = ["link", "add", one, "type", "veth", "peer", "name", other];
        ip(&[&["-n", left], &link[..], &["netns", right]].concat())?;
        for (end, name) in self.names.iter().enumerate() {
            let address = format!("{}/24", self.address(end));
            let device = &self.devices[end];
            ip(&["-n", name, "address", "add", &address, "dev", device])?;
            ip(&["-n", name, "link", "set", device, "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// An end's namespace.
    pub fn name(&self, end: usize) -> &str {
        &self.names[end]
    }

    /// An end's address.
    pub fn address(&self, end: usize) -> String {
        format!("10.231.{}.{}", self.subnet, end + 1)
    }

    /// Cuts the cable: neither end gets a packet about it.
    pub fn cut(&self) {
        self.set("down");
    }

    /// Heals it.
    pub fn heal(&self) {
        self.set("up");
    }

    fn set(&self, state: &str) {
        let device = &self.devices[0];
        ip(&["-n", &self.names[0], "link", "set", device, state]).expect("the link is ours");
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            // The devices go with it. It may never have been made.
            ip(&["netns", "delete", name]).ok();
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), String> {
    match Command::new("ip").args(arguments).output() {
        Ok(Output { status, .. }) if status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Err(format!("ip: {error}")),
    }
}
