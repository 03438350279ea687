-- Adds iSER over iWARP to Wireshark, which dissects iSER only over InfiniBand.
-- A Send carries the iSER header (RFC 7145, section 9.2). In a control-type PDU an
-- iSCSI PDU follows, which goes to Wireshark's own dissector.

local iser = Proto("iser_iwarp", "iSCSI Extensions for RDMA (iWARP)")
local f = iser.fields
f.opcode = ProtoField.uint8("iser_iwarp.opcode", "Opcode", base.DEC,
	{ [1] = "iSCSI control-type PDU", [2] = "Hello", [3] = "HelloReply" }, 0xf0)
f.w = ProtoField.bool("iser_iwarp.wsv", "Write STag valid", 8, nil, 0x08)
f.r = ProtoField.bool("iser_iwarp.rsv", "Read STag valid", 8, nil, 0x04)
f.wstag = ProtoField.uint32("iser_iwarp.wstag", "Write STag", base.HEX)
f.wbase = ProtoField.uint64("iser_iwarp.wbase", "Write base offset", base.HEX)
f.rstag = ProtoField.uint32("iser_iwarp.rstag", "Read STag", base.HEX)
f.rbase = ProtoField.uint64("iser_iwarp.rbase", "Read base offset", base.HEX)

local header = 28
local iscsi = Dissector.get("iscsi")

-- The iSCSI dissector claims the TCP connection for itself, as if it were iSCSI
-- over TCP. This protocol takes the claim over and leaves the connection to MPA.
local release = Proto("iser_iwarp_tcp", "TCP connection of iSER")
function release.dissector() return 0 end

function iser.dissector(tvb, pinfo, tree)
	local t = tree:add(iser, tvb(0, header))
	t:add(f.opcode, tvb(0, 1))
	t:add(f.w, tvb(0, 1))
	t:add(f.r, tvb(0, 1))
	t:add(f.wstag, tvb(4, 4))
	t:add(f.wbase, tvb(8, 8))
	t:add(f.rstag, tvb(16, 4))
	t:add(f.rbase, tvb(20, 8))
	if tvb:len() > header then
		iscsi:call(tvb(header):tvb(), pinfo, tree)
		pinfo.conversation = release
	end
	return tvb:len()
end

-- Only the four Sends (RFC 5040, section 4.3: 3 to 6) carry iSER; the rest is data.
local rdmap_opcode = Field.new("iwarp_rdma.opcode")

iser:register_heuristic("iwarp_ddp_rdmap", function(tvb, pinfo, tree)
	local seen = { rdmap_opcode() }
	local opcode = seen[#seen] and seen[#seen].value or 0
	if opcode < 3 or opcode > 6 or tvb:len() < header then
		return false
	end
	iser.dissector(tvb, pinfo, tree)
	return true
end)
