-- A shard's line of text, read into a table and written again; what is empty is left out.
-- claim=3 state=running by=NAME call=9f3c01ab died=1,2 group=0-19@2 alone=2 completed=17 failed=0 prompt=5120 completion=2048 cost=6400

local shard_words = {'claim', 'state', 'by', 'call', 'died', 'group', 'alone',
                     'completed', 'failed', 'prompt', 'completion', 'cost'}

local function read_shard(text)
  local shard = {}
  for word, value in string.gmatch(text or '', '(%w+)=(%S+)') do
    shard[word] = value
  end
  return shard
end

local function write_shard(shard)
  local words = {}
  for _, word in ipairs(shard_words) do
    local value = shard[word]
    if value and value ~= '' then
      words[#words + 1] = word .. '=' .. value
    end
  end
  return table.concat(words, ' ')
end

-- Claim numbers as `2,5,6`: one more at the end, of which the last 8 stay.
local function with_claim(list, claim)
  local claims = {}
  for one in string.gmatch(list or '', '%d+') do
    claims[#claims + 1] = one
  end
  claims[#claims + 1] = claim
  return table.concat(claims, ',', math.max(1, #claims - 7))
end

local function without_claim(list, claim)
  local claims = {}
  for one in string.gmatch(list or '', '%d+') do
    if one ~= claim then
      claims[#claims + 1] = one
    end
  end
  return table.concat(claims, ',')
end
